# shellcheck shell=bash
# What every job script sources: manygpus/jobs/scripts/job_env.sh, which comes with the package.
source "${BASH_SOURCE[0]%/*}/../manygpus/jobs/scripts/job_env.sh"
