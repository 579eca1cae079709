"""What can be measured on a GPU, part by part, each in a process of its own. See `python -m benchmarks.gpu --help`."""
