"""Long jobs over `penstock.llm`. Jobs are repeated sampling and files of prompts; `penstock doctor`
is here too."""
