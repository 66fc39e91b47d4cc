"""Does a PyTorch training continue exactly after a kill? For any loader and any script.

loaders      check_resume: a loader's state is taken, its process killed, the state loaded
scripts      the command: a training script is killed and started again
processes    what both run: a process that sends what came, and is ended if it hangs
recording    in the script's process: what a model is trained on is one step
comparison   what came in two runs: which batches were lost, repeated, or are others
digests      batches as trees of digests, small enough to keep and to send
"""

from resume_check.loaders import ResumeCheck, ResumeDifference, check_resume
from resume_check.words import OptionError

__all__ = ["OptionError", "ResumeCheck", "ResumeDifference", "check_resume"]
