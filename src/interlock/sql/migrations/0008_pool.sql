-- Workers whose processes a supervisor keeps: who keeps them, and the one process that a row has at a time. A row is
-- supervised if its metadata has a `spec`; all others belong to processes that say by themselves that they are here.
alter table interlock.workers
    -- a lease like that on a task: whoever holds it is in command, and a dead supervisor's runs out
    add column supervisor_id text,
    add column supervised_until timestamptz,
    -- the fence of process starts: it grows with each and never goes back, and a process that finds another stops
    add column generation int not null default 0,
    add column instance text,                       -- the process as holder of tasks: their worker_id
    add column host text,                           -- where process ids mean something
    add column pid int,                             -- while there is a process, as far as is known
    add column birth text,                          -- when it began, as its host tells: ids of processes are used again
    add column process_started_at timestamptz,
    add column memory_bytes bigint,
    -- quick ends in a row, when it is tried again, and what happened last
    add column crashes int not null default 0,
    add column restart_at timestamptz,
    add column process_note text,
    add constraint workers_supervised check ((supervisor_id is null) = (supervised_until is null)),
    add constraint workers_generation check (generation >= 0 and crashes >= 0);

create index workers_supervised on interlock.workers (supervisor_id) where metadata ? 'spec';
-- Who runs a task is told by its worker_id, which is the id of a row or of a supervised row's process.
create index workers_instance on interlock.workers (instance) where instance is not null;
