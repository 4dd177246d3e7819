-- The plan of the hints is made for the session's first statement, often one row, for which a sort is as good as any.
-- Kept for a COPY of many thousands it sorts them all to find one namespace; a hash table never has to.
alter function interlock.notify_pending() set enable_sort = off;
