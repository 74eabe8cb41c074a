"""The autoencoder on gene counts: its latent state finds the cell types, and its loss is right."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import COMPLETE, Script, succeeded
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

SCRIPT = COMPLETE / "vae_counts.py"


@pytest.fixture
def vae(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import vae_counts

    return vae_counts


def test_the_latent_state_finds_the_cell_types(vae: ModuleType, script: Script, tmp_path: Path) -> None:
    """Clusters of the latent state match the types and not the plates, as those of the counts do."""
    arguments = ("--train-size", 3000, "--epochs", 15, "--recipe", "fast", "--lr", 0.01, "--save-model")
    succeeded(script(SCRIPT, *arguments, "--results-dir", tmp_path))
    (weights,) = (tmp_path / "models").glob("*.pt")
    inputs, types = vae.draw_cells(vae.TEST_CELLS, part=2)
    counts, plates, _ = inputs.split(vae.COLUMNS, dim=1)
    model = vae.CountsVAE(hidden=128)
    model.load_state_dict(torch.load(weights, weights_only=True))
    with torch.no_grad():
        mean, _ = model.encode(inputs)

    def match(cells: torch.Tensor) -> tuple[float, float]:
        """Return the adjusted Rand index of clusters with the types, and with the plates."""
        clusters = KMeans(vae.TYPES, n_init=10, random_state=0).fit_predict(cells)
        return adjusted_rand_score(types, clusters), adjusted_rand_score(plates.argmax(dim=1), clusters)

    by_type, by_plate = match(mean)
    assert by_type > 0.9 and abs(by_plate) < 0.02
    by_type, by_plate = match(counts.log1p())
    assert by_type < 0.2 and by_plate > 0.4


def test_the_cells_are_of_the_model_that_is_told(vae: ModuleType) -> None:
    """Within a type and plate, counts scatter more than a Poisson distribution's, by mean^2 / dispersion."""
    inputs, types = vae.draw_cells(6_000, 1)
    again, _ = vae.draw_cells(6_000, 1)
    held_out, _ = vae.draw_cells(6_000, 2)
    assert inputs.equal(again) and not inputs.equal(held_out)
    counts, plates, noise = inputs.split(vae.COLUMNS, dim=1)
    assert types.bincount().min() > 600 and plates.sum(dim=1).eq(1).all() and noise.std() > 0.9
    library_sizes = counts.sum(dim=1, keepdim=True)
    assert library_sizes.log().std().item() == pytest.approx(0.4, abs=0.05)
    alike = (types == 0) & plates[:, 0].bool()
    shares = (counts / library_sizes)[alike]
    means = shares.mean(dim=0) * library_sizes[alike]
    frequent = means.mean(dim=0) > 3
    extra = ((counts[alike] - means).square() - means).mean(dim=0) / means.square().mean(dim=0)
    # 1 / dispersion, which was drawn from 1 to 5.
    assert 1 / 5 < extra[frequent].median() < 1 / 2


def test_the_loss_is_that_of_other_libraries(vae: ModuleType) -> None:
    from scipy.stats import nbinom
    from torch.distributions import Normal, kl_divergence

    torch.manual_seed(1)
    inputs, _ = vae.draw_cells(5, 1)
    counts = inputs[:, : vae.GENES]
    with torch.no_grad():
        output = vae.CountsVAE(hidden=8)(inputs)
    means = output.dispersion * output.logits.exp()
    torch.testing.assert_close(means.sum(dim=1), counts.sum(dim=1))  # the library size, as it was seen
    n = output.dispersion.numpy()
    of_counts = -nbinom.logpmf(counts.numpy(), n, n / (n + means.numpy())).sum()
    latent = Normal(output.mean, (0.5 * output.log_variance).exp())
    kl = kl_divergence(latent, Normal(0.0, 1.0)).sum().item()
    for weight in (1.0, 0.25):
        loss = vae.negative_elbo(output, counts, reduction="sum", kl_weight=weight).item()
        assert loss == pytest.approx(of_counts + weight * kl, rel=1e-5)
    assert 5 * vae.negative_elbo(output, counts).item() == pytest.approx(of_counts + kl, rel=1e-5)


def test_what_helps_the_critic_is_unlearned(vae: ModuleType) -> None:
    torch.manual_seed(1)
    inputs, _ = vae.draw_cells(5, 1)
    model, noise = vae.CountsVAE(hidden=8), torch.zeros(5, vae.LATENT)
    model(inputs, noise, ask_critic=True).guess[:, 0].sum().backward()
    of_critic, of_encoder = model.critic.weight.grad.clone(), model.encoder[0].weight.grad.clone()
    model.zero_grad()
    model.critic(model.encode(inputs)[0])[:, 0].sum().backward()
    assert of_encoder.abs().max() > 0
    torch.testing.assert_close(of_encoder, -model.encoder[0].weight.grad)
    torch.testing.assert_close(of_critic, model.critic.weight.grad)
