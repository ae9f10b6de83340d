-- In which numbers the two models computed; NULL in rows of before.
ALTER TABLE tickets ADD COLUMN precision TEXT;

CREATE TRIGGER precision_is_final BEFORE UPDATE OF precision ON tickets
BEGIN SELECT RAISE (ABORT, 'a decision is never changed'); END;
