package codeq

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
)

// Codec turns the values of handlers and producers into the bytes that tasks carry, and back. Its
// methods are called by several goroutines at a time.
type Codec interface {
	// Marshal returns bytes that nobody else writes to.
	Marshal(v any) ([]byte, error)
	// Unmarshal is given a pointer. It may keep data.
	Unmarshal(data []byte, v any) error
}

// JSON is the codec that is encoding/json, for whoever does not name another.
type JSON struct{}

// Marshal is [json.Marshal].
func (JSON) Marshal(v any) ([]byte, error) { return json.Marshal(v) }

// Unmarshal is [json.Unmarshal].
func (JSON) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }

// PayloadOption says how the payloads and results of a queue are encoded. Handle, NewTask and
// ResultAs of the same queue are given the same options.
type PayloadOption func(*encoding)

// WithCodec names the codec. Default: [JSON].
//
// It is an option of each queue and not of the Mux, because the encoding is agreed between the
// producers and the handler of one queue: queues of one program may differ in it, and move to
// another one at a time.
func WithCodec(c Codec) PayloadOption { return func(e *encoding) { e.codec = c } }

// encoding is what is made of PayloadOptions. []byte is its own encoding, and no bytes are the zero
// value, whatever the codec.
type encoding struct{ codec Codec }

// encodingOf refuses an encoding without a codec with an InvalidError.
func encodingOf(opts []PayloadOption) (*encoding, error) {
	e := &encoding{codec: JSON{}}
	for _, opt := range opts {
		if opt == nil {
			return nil, &InvalidError{"PayloadOption", "nil", "an option"}
		}
		opt(e)
	}
	if e.codec == nil {
		return nil, &InvalidError{"WithCodec codec", "nil", "a Codec"}
	}
	return e, nil
}

// encode returns v itself if it is bytes.
func (e *encoding) encode(v any) ([]byte, error) {
	if raw, ok := v.([]byte); ok {
		return raw, nil
	}
	return e.codec.Marshal(v)
}

// decode fills in what v points to, which is zero.
func (e *encoding) decode(data []byte, v any) error {
	if raw, ok := v.(*[]byte); ok {
		*raw = data
		return nil
	}
	if len(data) == 0 {
		return nil
	}
	return e.codec.Unmarshal(data, v)
}

// NewTask returns a task whose payload is args, encoded as Handle decodes it: by JSON unless
// options say otherwise, and a copy of []byte as it is. The other fields of the task are the
// caller's to set. An error is that of the codec, or an [InvalidError] if an option is nil.
func NewTask[T any](queue string, args T, opts ...PayloadOption) (_ Task, err error) {
	defer public(&err)
	e, err := encodingOf(opts)
	if err != nil {
		return Task{}, err
	}
	payload, err := e.encode(args)
	if err != nil {
		return Task{}, fmt.Errorf("codeq: payload of queue %s from %T: %w", queue, args, err)
	}
	if _, ok := any(args).([]byte); ok {
		payload = bytes.Clone(payload)
	}
	return Task{Queue: queue, Payload: payload}, nil
}

// ResultAs returns the result of a completed task, decoded as Handle decodes payloads; a task that
// was completed without a result has the zero T. An error is that of the codec, or an
// [InvalidError] if the task is not Done or an option is nil.
func ResultAs[T any](t *TaskInfo, opts ...PayloadOption) (_ T, err error) {
	defer public(&err)
	var result T
	e, err := encodingOf(opts)
	if err != nil {
		return result, err
	}
	if t.State != Done {
		return result, &InvalidError{"TaskInfo.State", t.State, Done.String()}
	}
	if err := e.decode(t.Result, &result); err != nil {
		return result, fmt.Errorf("codeq: result of queue %s into %T: %w", t.Queue, result, err)
	}
	return result, nil
}

// The headers in which a W3C trace context travels. Together they are one value: tracestate is of
// no use without its traceparent.
const (
	traceParent = "traceparent"
	traceState  = "tracestate"
)

// inheritTrace has tasks that carry no trace context, not even an empty one, carry that of from.
// Nothing is added beyond the limit, in bytes, for a task's headers. The maps of the tasks may be
// shared and are not written to.
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
