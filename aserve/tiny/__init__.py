"""The bundled model, in `MODEL_DIR` in Hugging Face format, and its drafters in `DRAFTERS_DIR`.

tools/train_tiny makes the model, and tools/train_drafters makes the drafters.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
DRAFTERS_DIR = Path(__file__).parent / "drafters"
