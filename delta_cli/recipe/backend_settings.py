"""From a recipe to what its backend needs."""

from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.recipe.models import Recipe


def backend_settings(recipe: Recipe) -> BackendSettings:
    """The settings of the recipe's learner. Its sections are passed whole: [update] is both optimizer and memory."""
    return BackendSettings(
        model=recipe.model.but(path=model_path(recipe.model.path)),
        optimizer=recipe.update,
        memory=recipe.update,
        parallel=recipe.parallel,
        rollout_batch=recipe.rollout.batch,
        seed=recipe.run.seed,
        threads=recipe.run.threads,
        deterministic=recipe.run.deterministic,
        keep_reference=recipe.update.kl_coefficient > 0 or recipe.method.hidden_residuals,
        publish_adapters=recipe.engine.takes_adapters,
    )
