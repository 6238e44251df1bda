"""A matrix product with its tail as one operation (section 33.4), and a plan that says what runs."""

from flashspec.fusion.api import matmul_epilogue, plan_matmul_epilogue
from flashspec.fusion.plan import EpiloguePlan
from flashspec.fusion.request import ACTIVATIONS, EpilogueRequest

__all__ = ["ACTIVATIONS", "EpiloguePlan", "EpilogueRequest", "matmul_epilogue", "plan_matmul_epilogue"]
