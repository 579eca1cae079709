"""echo2: reinforcement-learning post-training of LLMs over a wide-area network.

ARCHITECTURE.md is the map; each subpackage's DESIGN.md is its argument.
"""

__version__ = "0.1.0"
