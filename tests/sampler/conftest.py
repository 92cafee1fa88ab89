import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # sampling_model.py, sampling_graphs.py
