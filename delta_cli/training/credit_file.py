"""Open the weight function that a method names."""

from __future__ import annotations

from pathlib import Path

from delta_cli.credit import Method
from delta_cli.credit.weight_functions import FUNCTION_IN_FILE, WEIGHT_FUNCTIONS, WeightFunction
from delta_cli.errors import UserError
from delta_cli.user_file import load_function


def open_weight_function(method: Method) -> WeightFunction | None:
    """The method's weight function; None if its credit is another one.

    Raises UserError if the file or the function is missing, or the function has more than two parameters.
    """
    if method.weight_function is None:
        return None
    in_file = FUNCTION_IN_FILE.fullmatch(method.credit)
    if in_file is None:
        return WeightFunction(method.credit, WEIGHT_FUNCTIONS[method.credit])
    usage = f"{in_file['function']}(batch) -> weights [N]"
    function = WeightFunction(method.credit, load_function(Path(in_file["file"]), in_file["function"], "credit", usage))
    if function.parameters not in (1, 2):
        raise UserError(f"credit file {in_file['file']}: define {usage}, or with features as a second parameter")
    return function
