from tests.e2e.conftest import base_model

__all__ = ["base_model"]
