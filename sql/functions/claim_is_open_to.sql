CREATE OR REPLACE FUNCTION :"schema".claim_is_open_to(
    p_claim :"schema".processor_claims, p_cluster text, p_namespace text, p_name text, p_uid text, p_sweep_uids text[]
) RETURNS boolean
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = :"schema", pg_temp
AS $function$
-- Its own holder, the same resource created again, anybody 30 s after it was vacated, and the cluster that knows its
-- own resource to be gone.
SELECT p_claim.uid = p_uid
    OR (p_claim.cluster, p_claim.namespace, p_claim.name) = (p_cluster, p_namespace, p_name)
    OR coalesce(p_claim.vacated_at < clock_timestamp() - interval '30 seconds', false)
    OR (p_claim.cluster = p_cluster AND p_claim.uid = ANY (coalesce(p_sweep_uids, '{}')))
$function$;
