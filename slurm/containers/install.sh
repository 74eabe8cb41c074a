#!/usr/bin/env bash
# The steps that turn a base with Python >= 3.10 and pip into an image for the jobs: the one list of them, for
# Dockerfile and tutorial.def. Both put it next to copies of pyproject.toml and trainkit/, and run it there, as root.
set -euo pipefail

# With git a run records which commit it was. The small bases do not have it.
if ! command -v git >/dev/null; then
    apt-get update
    apt-get install --yes --no-install-recommends git
    rm -rf /var/lib/apt/lists/*
fi

# What pyproject.toml lists. A PyTorch that the base brings along stays, if it is not too old.
python -m pip install --no-cache-dir .

# Fail if the image cannot train. From another folder, so that it is the installed trainkit.
cd /
python -c 'import torch, torchvision, trainkit.jobs, trainkit.compare; print("PyTorch", torch.__version__)'
git --version
