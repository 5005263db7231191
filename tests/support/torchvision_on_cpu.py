"""A plugin of pytest: torchvision without its compiled part, which its wheels have for CUDA alone.

Its import names operations of that part, which timm's transforms of pictures do without. It comes before all else, as
transformers imports torchvision where it is installed.
"""

import torch

_register = torch.library.register_fake
torch.library.register_fake = lambda *_, **__: lambda function: function
import torchvision  # noqa: F401, E402

torch.library.register_fake = _register
