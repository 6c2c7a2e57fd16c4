"""The code in every model's wheel: `Model().run({...})`, or `python -m` this package.

This folder is copied into every wheel that `farm model package` writes, with the model beside it. It needs NumPy and
TVM's runtime, and Pillow for images; nothing of the farm.
"""

from .inputs import InputError
from .runner import Model

__all__ = ["InputError", "Model"]
