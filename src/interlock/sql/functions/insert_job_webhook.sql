-- Inserts the webhook of a job in the transaction that ends it, whichever statement that is, and notifies the sender. Jobs
-- without a callback URL cost the condition of the trigger only.
--
-- Runs as the owner, so that a client that ends a job needs no right on the outbox; on this table alone, so that no client
-- can send webhooks of its own by a trigger on another table.
create or replace function interlock.insert_job_webhook() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp as $$
begin
    if tg_relid <> 'interlock.jobs'::regclass then
        raise exception 'insert_job_webhook() is a trigger of interlock.jobs only' using errcode = 'IL004';
    end if;
    insert into interlock.callbacks (job_id, state, url) values (new.id, new.status, new.callback_url);
    perform pg_notify('interlock_duties', 'callbacks');
    return null;
end
$$;

revoke execute on function interlock.insert_job_webhook() from public;

create or replace trigger insert_job_webhook after update of status on interlock.jobs for each row
    when (new.callback_url is not null and new.status in ('COMPLETED', 'FAILED', 'CANCELED')
        and old.status in ('SUBMITTED', 'PENDING', 'RUNNING'))
    execute function interlock.insert_job_webhook();
alter table interlock.jobs enable always trigger insert_job_webhook;
