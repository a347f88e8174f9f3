-- The rights that the technical user needs, and nothing more; made by owl-sap grants. To be run by the owner of
-- the tables, or an administrator, from the first line to the last. The user himself is made apart, for his
-- password stands in no file: CREATE USER ... PASSWORD ... NO FORCE_FIRST_PASSWORD_CHANGE; then ALTER USER ...
-- DISABLE PASSWORD LIFETIME. A grant on a change log can be run once the log is there.

-- in the HANA of [hana]
-- materials: reading rows
GRANT SELECT ON "SAPABAP1"."MARA" TO "OWL";
-- orders: reading rows
GRANT SELECT ON "SAPABAP1"."/BIC/AZD00100" TO "OWL";
-- orders: the change log (created by owl-sap changes install orders), which a sync reads and empties
GRANT SELECT, DELETE ON "LOGS"."odd name" TO "OWL";

-- in the HANA of [store.hana]
-- vectors and their state; where it is there and not his: GRANT CREATE ANY ON SCHEMA "Vectors" TO "Owl@cloud"
CREATE SCHEMA "Vectors" OWNED BY "Owl@cloud";
