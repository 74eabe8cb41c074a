"""What nn.SyncBatchNorm computes on GPUs, for CPUs, which that refuses."""

import torch
from torch import nn

from manygpus.distributed import process_group


class SyncOnCPU(nn.BatchNorm2d):
    """BatchNorm by the mean and the variance of all ranks' images together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        # The ranks have equally many images: so the mean over all is the mean of the ranks' means.
        mean = SumOverRanks.apply(x.to(self.weight.dtype).mean((0, 2, 3))) / process_group.count()
        centred = x - mean[:, None, None]
        variance = SumOverRanks.apply(centred.square().mean((0, 2, 3))) / process_group.count()
        with torch.no_grad():  # for evaluation
            count = process_group.count() * x.numel() / x.size(1)
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        factor = self.weight * (variance + self.eps).rsqrt()
        return centred * factor[:, None, None] + self.bias[:, None, None]


class SumOverRanks(torch.autograd.Function):
    """Each rank's loss depends on the sum, so the gradient of what a rank added is the sum over the ranks."""

    @staticmethod
    def forward(_: object, values: torch.Tensor) -> torch.Tensor:
        return process_group.sum_in_place(values.clone())

    @staticmethod
    def backward(_: object, gradients: torch.Tensor) -> torch.Tensor:
        return process_group.sum_in_place(gradients.clone())
