"""Make the batches of a worker on a cluster."""

from __future__ import annotations

from forebay.loading.batch_job import ProcessJob
from forebay.loading.messages import BatchResult
from forebay.pools.events import Answer, Assignment


class HostedJob(ProcessJob):
    """Makes batches on a cluster; errors are bytes there, since hosts may lack their classes."""

    def run(self, assignment: Assignment) -> Answer:
        """Answer a request; see `BatchJob.run`."""
        answer = super().run(assignment)
        if isinstance(answer.result, BatchResult):
            return answer
        import cloudpickle

        return answer._replace(result=cloudpickle.dumps(answer.result))
