-- The least rights that the technical user needs, made by owl-sap grants. Run all lines as the owner of the
-- tables or an administrator. Create the user separately, because its password belongs in no file: CREATE USER
-- ... PASSWORD ... NO FORCE_FIRST_PASSWORD_CHANGE; then ALTER USER ... DISABLE PASSWORD LIFETIME. Run a grant on
-- a change log once the log exists.

-- in the HANA of [hana]
-- materials: reading rows
GRANT SELECT ON "SAPABAP1"."MARA" TO "OWL";
-- orders: reading rows
GRANT SELECT ON "SAPABAP1"."/BIC/AZD00100" TO "OWL";
-- orders: the change log (created by owl-sap changes install orders), which a sync reads and empties
GRANT SELECT, DELETE ON "LOGS"."odd name" TO "OWL";

-- in the HANA of [store.hana]
-- vectors and their state; where the schema exists and has another owner: GRANT CREATE ANY ON SCHEMA "Vectors" TO "Owl@cloud"
CREATE SCHEMA "Vectors" OWNED BY "Owl@cloud";
