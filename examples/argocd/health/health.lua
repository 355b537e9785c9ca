-- Health of an OutboxProcessor for Argo CD. The first question that has an answer decides.
-- Only what Argo CD opens by default is used: the base and table libraries, no string library.

local function condition(type)
  for _, candidate in ipairs(obj.status.conditions) do
    if candidate.type == type then
      return candidate
    end
  end
  return {}
end

local function says(health, about, otherwise)
  local message = about.message
  if message == nil or message == "" then
    message = otherwise
  end
  return { status = health, message = message }
end

if obj.metadata.deletionTimestamp ~= nil then
  local finalizers = obj.metadata.finalizers
  if finalizers ~= nil and #finalizers > 0 then
    return says("Progressing", {}, "Being deleted; waiting for the finalizers " .. table.concat(finalizers, ", "))
  end
  return says("Progressing", {}, "Being deleted")
end

if obj.status == nil or obj.status.conditions == nil or #obj.status.conditions == 0 then
  return says("Progressing", {}, "Waiting for the operator's first look")
end

-- What the status says is about an older spec.
if obj.status.observedGeneration == nil or obj.status.observedGeneration < obj.metadata.generation then
  return says("Progressing", {}, "Waiting for the operator to see the latest change")
end

-- Suspended as asked. With another reason it is a conflict that keeps the workers away, and that is Stalled.
local suspended = condition("Suspended")
if suspended.status == "True" and suspended.reason == "Suspended" then
  return says("Suspended", suspended, "Suspended")
end

local stalled = condition("Stalled")
if stalled.status == "True" then
  return says("Degraded", stalled, "Stalled; kubectl describe says why")
end

local ready = condition("Ready")
if ready.status == "True" then
  return says("Healthy", ready, "Messages are being processed")
end
return says("Progressing", ready, "Not ready yet")
