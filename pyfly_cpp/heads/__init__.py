"""Heads for any model, trained where it runs: EAGLE-3 heads made from a target's GGUF file and texts.

`plan.py` estimates what a training will take, `training.py` does it: texts (`texts.py`; by default what the target
answers to `built_in_prompts.py`), the target's hidden states for them (`state_file.py`), learning (`fit.py`) and the
file (`export.py`). Layers and learning need PyTorch: the extra `train`.
"""

from pyfly_cpp.heads.plan import TrainingPlan, plan_head
from pyfly_cpp.heads.training import Trained, train_head

__all__ = ["Trained", "TrainingPlan", "plan_head", "train_head"]
