"""Sums arrays over the workers of one host through shared memory. Without TensorFlow; see exchange.py."""

from replicast.allreduce.exchange import Exchange
from replicast.allreduce.exchange_opening import SEVERAL_HOSTS, open_exchange
from replicast.allreduce.message_layout import ExchangePlan, Form
from replicast.allreduce.part import WorkerPart

__all__ = ["SEVERAL_HOSTS", "Exchange", "ExchangePlan", "Form", "WorkerPart", "open_exchange"]
