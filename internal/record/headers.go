package record

import "maps"

// The headers of a W3C trace context. Together they are one value: tracestate is of no use without
// its traceparent.
const (
	traceParent = "traceparent"
	traceState  = "tracestate"
)

// HeaderBytes is the size of all names and values of headers.
func HeaderBytes(headers map[string]string) int {
	n := 0
	for k, v := range headers {
		n += len(k) + len(v)
	}
	return n
}

// InheritTrace returns headers with the trace context in from. It returns headers themselves, which
// it does not change, if from has none, if they have one, even an empty one, or if the result would
// be larger than limit.
func InheritTrace(headers, from map[string]string, limit int) map[string]string {
	parent, ok := from[traceParent]
	if !ok {
		return headers
	}
	_, hasParent := headers[traceParent]
	if _, has := headers[traceState]; has || hasParent {
		return headers
	}
	all := make(map[string]string, len(headers)+2)
	maps.Copy(all, headers)
	all[traceParent] = parent
	if state, has := from[traceState]; has {
		all[traceState] = state
	}
	if HeaderBytes(all) > limit {
		return headers
	}
	return all
}
