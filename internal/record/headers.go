package record

import (
	"maps"
	"strconv"
	"strings"
)

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

// The headers of a task that the death of another one has produced.
const (
	DeathTask   = "codeq-dead-task"   // its ID
	DeathQueue  = "codeq-dead-queue"  // its queue
	DeathKind   = "codeq-dead-kind"   // its kind, if it has one
	DeathReason = "codeq-dead-reason" // its last error; up to maxReason bytes
	DeathCount  = "codeq-deaths"      // how many deaths, one after the other, have led here
)

const maxReason = 1 << 10

// MaxDeaths is how many deaths produce a task from the task of the one before: two queues may be
// the dead-letter queues of each other.
const MaxDeaths = 8

// ForgetDeath removes them from the headers of a task that begins anew.
func ForgetDeath(headers map[string]string) {
	for _, name := range [...]string{DeathTask, DeathQueue, DeathKind, DeathReason, DeathCount} {
		delete(headers, name)
	}
}

// DeathHeaders returns the headers of the task for the death of a task of a queue; ok is false if
// there were too many before.
func DeathHeaders(of *Record, task, queue string) (headers map[string]string, ok bool) {
	n, _ := strconv.Atoi(of.Headers[DeathCount])
	if n < 0 || n >= MaxDeaths {
		return nil, false
	}
	headers = make(map[string]string, len(of.Headers)+5)
	maps.Copy(headers, of.Headers)
	if delete(headers, DeathKind); of.Kind != "" {
		headers[DeathKind] = of.Kind
	}
	headers[DeathTask], headers[DeathQueue] = task, strings.ToValidUTF8(queue, "\ufffd")
	headers[DeathReason] = strings.ToValidUTF8(Clip(of.Error, maxReason), "\ufffd")
	headers[DeathCount] = strconv.Itoa(n + 1)
	return headers, true
}
