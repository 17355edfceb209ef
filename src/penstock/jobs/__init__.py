"""The long jobs, over `penstock.llm`: repeated sampling, files of prompts;
and `penstock doctor`."""
