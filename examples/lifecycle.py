"""A lifecycle in memory: the table defines the allowed transitions, and the machine keeps a history."""

from interlock.lifecycle import TASK_ROW, TaskRowEvent, TaskRowState
from interlock.machine import StateMachine

task = StateMachine(TASK_ROW, TaskRowState.PENDING)
task.transition(TaskRowEvent.CLAIM)
task.transition(TaskRowEvent.SUCCEED, reason="mail sent")
print(task.state, [move.event.value for move in task.history])

print(TASK_ROW.validate_transition(TaskRowState.DONE, TaskRowState.RUNNING))
print(TASK_ROW.allowed_events(TaskRowState.RUNNING))
