"""What every transport solver promises, whatever its file."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmlkit.testing import check_transport
from dmlkit.testing.transport import expect_plan, random_problem, with_gaps
from dmlkit.transport.base import TransportConfig

NAMES = sorted(name for name, variant in TransportConfig.variants.items() if variant.moves)


@pytest.mark.parametrize("name", sorted(TransportConfig.variants))
def test_contract(name: str):
    check_transport(TransportConfig.variants[name]())


@pytest.mark.parametrize("name", sorted({*NAMES} - {"cvxpy"}))  # it compiles each shape: 20 ms
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_marginals_hold_for_any(name: str, data: st.DataObject):
    masses = st.floats(0.01, 4).map(lambda mass: round(mass, 3)) | st.just(0.0) | st.sampled_from([1.0, 2.0])
    rows = data.draw(st.lists(masses, min_size=1, max_size=5).filter(lambda values: sum(values) > 0))
    shares = data.draw(st.lists(masses, min_size=1, max_size=6).filter(lambda values: sum(values) > 0))
    costs = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-1, 2)
    size = len(rows) * len(shares)
    cost = data.draw(st.lists(costs, min_size=size, max_size=size))
    row_tensor = torch.tensor([rows], dtype=torch.float64)
    col_tensor = torch.tensor([shares], dtype=torch.float64)
    col_tensor *= row_tensor.sum() / col_tensor.sum()
    plan = (
        TransportConfig.variants[name]()
        .build()
        .plan(torch.tensor(cost, dtype=torch.float64).view(1, len(rows), len(shares)), row_tensor, col_tensor)
    )
    expect_plan(plan, row_tensor, col_tensor)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_gpu_equals_cpu(name: str):
    solver = TransportConfig.variants[name]().build()
    for problem in (random_problem(4), with_gaps()):
        plan = solver.plan(*(part.cuda() for part in problem))
        assert plan.is_cuda
        torch.testing.assert_close(plan.cpu(), solver.plan(*problem), atol=1e-6, rtol=0)
