"""Tell why a job failed, with the end of its log.

Try: manygpus why 17
"""

from manygpus.commands.jobs import show
from manygpus.config.command_line import Parser, add_json
from manygpus.errors import entrypoint
from manygpus.jobs.site import read_site


@entrypoint
def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("job", metavar="JOB", help="its number, as squeue and `manygpus jobs` show it")
    add_json(parser, "what is known of the job")
    options = parser.parse_args()
    show(read_site(), options.job, options.json)
