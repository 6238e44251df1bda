"""A matrix product with its tail as one operation (section 33.4), and a plan that says what runs."""

from flashspec.fusion.api import matmul_epilogue, plan_matmul_epilogue
from flashspec.fusion.gated import GatedProductPlan, gated_product, plan_gated_product
from flashspec.fusion.plan import EpiloguePlan
from flashspec.fusion.request import ACTIVATIONS, EpilogueRequest

__all__ = [
    "ACTIVATIONS",
    "EpiloguePlan",
    "EpilogueRequest",
    "GatedProductPlan",
    "gated_product",
    "matmul_epilogue",
    "plan_gated_product",
    "plan_matmul_epilogue",
]
