"""`weft sweep`: a table of a paper is a Python file, and each of its cells is a run."""

from .cells import Cell, Job, Sweep, changed, check_folder, is_sweep, jobs_of, load_sweep, parse_override

__all__ = ["Cell", "Job", "Sweep", "changed", "check_folder", "is_sweep", "jobs_of", "load_sweep", "parse_override"]
