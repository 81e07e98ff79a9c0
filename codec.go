package codeq

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Codec encodes the values of producers and handlers as the bytes that tasks carry, and decodes
// them. Several goroutines call its methods at the same time.
type Codec interface {
	// Marshal returns bytes that nobody else writes to.
	Marshal(v any) ([]byte, error)
	// Unmarshal decodes data into the value to which v points. It may keep data.
	Unmarshal(data []byte, v any) error
}

// JSON is the default codec, which uses encoding/json.
type JSON struct{}

// Marshal calls [json.Marshal].
func (JSON) Marshal(v any) ([]byte, error) { return json.Marshal(v) }

// Unmarshal calls [json.Unmarshal].
func (JSON) Unmarshal(data []byte, v any) error { return json.Unmarshal(data, v) }

// PayloadOption sets how the payloads and results of a queue are encoded. [Handle], [NewTask] and
// [ResultAs] need the same options for the same queue.
type PayloadOption func(*encoding)

// WithCodec sets the codec. Default: [JSON].
//
// It is an option of each queue and not of the [Mux], because the producers and the handler of one
// queue agree on the encoding: queues of one program may differ in it, and change it one at a time.
func WithCodec(c Codec) PayloadOption { return func(e *encoding) { e.codec = c } }

// encoding is the result of PayloadOptions. With every codec []byte is encoded as itself, and no
// bytes are decoded as the zero value.
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

// encode returns v itself if it is a []byte.
func (e *encoding) encode(v any) ([]byte, error) {
	if raw, ok := v.([]byte); ok {
		return raw, nil
	}
	return e.codec.Marshal(v)
}

// decode decodes into the value to which v points. REQUIRES: the value is zero.
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

// NewTask returns a task whose payload is args, encoded as [Handle] decodes it: by JSON unless
// options set another codec; a []byte is copied as it is. The caller sets the other fields of the
// task.
//
// Errors: that of the codec, and [ErrInvalid] if an option is nil.
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

// ResultAs returns the result of a completed task, decoded as [Handle] decodes payloads; the result
// of a task that was completed without one is the zero T.
//
// Errors: that of the codec, and [ErrInvalid] if the task is not [Done] or an option is nil.
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
