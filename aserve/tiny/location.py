"""Where the bundled model lies.

It knows nothing about what is in the folder.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
