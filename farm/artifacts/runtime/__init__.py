"""The code in every model's wheel: `Model().run({...})`, or `python -m` this package.

`farm model package` copies this folder into every wheel, with the model beside it. It needs NumPy, TVM's runtime and,
for images, Pillow; it does not import the farm.
"""

from .inputs import InputError
from .runner import Model

__all__ = ["InputError", "Model"]
