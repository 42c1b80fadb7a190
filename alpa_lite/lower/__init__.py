"""From a plan to a program: which ops form a task, which instructions run the tasks, and the compiled executables."""
