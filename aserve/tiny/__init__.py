"""The bundled model: `MODEL_DIR` is its directory in Hugging Face format. tools/train_tiny makes
it.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
