from delta_cli.api.run import Run as Run
from delta_cli.api.train import train as train

__version__: str
