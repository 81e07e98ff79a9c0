package codeq

import "maps"

// The headers in which a W3C trace context travels. Together they are one
// value: tracestate is of no use without its traceparent.
const (
	traceParent = "traceparent"
	traceState  = "tracestate"
)

// inheritTrace has tasks that carry no trace context, not even an empty one,
// carry that of from. Nothing is added beyond the limit, in bytes, for a task's
// headers. The maps of the tasks may be shared and are not written to.
func inheritTrace(tasks []Task, from map[string]string, limit int) {
	parent, ok := from[traceParent]
	if !ok {
		return
	}
	state, hasState := from[traceState]
	for i := range tasks {
		t := &tasks[i]
		_, hasParent := t.Headers[traceParent]
		if _, has := t.Headers[traceState]; has || hasParent {
			continue
		}
		headers := make(map[string]string, len(t.Headers)+2)
		maps.Copy(headers, t.Headers)
		headers[traceParent] = parent
		if hasState {
			headers[traceState] = state
		}
		if headerBytes(headers) <= limit {
			t.Headers = headers
		}
	}
}
