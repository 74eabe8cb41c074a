#!/usr/bin/env bash
# Turn a base image with Python >= 3.10 and pip into an image for the jobs. Dockerfile and tutorial.def both copy this
# script, pyproject.toml and manygpus/ into the image, and run it there as root.
set -euo pipefail

# Runs record their commit with git, which small base images lack.
if ! command -v git >/dev/null; then
    apt-get update
    apt-get install --yes --no-install-recommends git
    rm -rf /var/lib/apt/lists/*
fi

# Install what pyproject.toml lists. The PyTorch of the base stays if it is new enough.
python -m pip install --no-cache-dir '.[train,reports]'

# Fail if the image cannot train. In a different folder, Python imports the installed manygpus, not the copy.
cd /
python -c 'import torch, torchvision, manygpus.jobs, manygpus.reports; print("PyTorch", torch.__version__)'
git --version
