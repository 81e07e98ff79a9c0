package codeq

import (
	"context"
	"encoding/xml"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// xmlCodec is a codec that cannot be taken for JSON.
type xmlCodec struct{}

func (xmlCodec) Marshal(v any) ([]byte, error)      { return xml.Marshal(v) }
func (xmlCodec) Unmarshal(data []byte, v any) error { return xml.Unmarshal(data, v) }

// brokenCodec refuses everything.
type brokenCodec struct{ err error }

func (c brokenCodec) Marshal(any) ([]byte, error) { return nil, c.err }
func (c brokenCodec) Unmarshal([]byte, any) error { return c.err }

type shape struct{ Sides int }

// TestCodecs: queues of one Mux may differ in their codecs; payloads go there
// and results come back by them.
func TestCodecs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Retention: time.Hour})
		var m Mux
		double := func(_ context.Context, j *Job[shape]) error {
			return j.SetResultValue(shape{2 * j.Args.Sides})
		}
		Handle(&m, "json", double)
		Handle(&m, "named", double, WithCodec(JSON{}))
		Handle(&m, "xml", double, WithCodec(xmlCodec{}))
		run := startRun(t, q, &m, RunOptions{})
		for _, tc := range []struct {
			queue, payload, result string
			opts                   []PayloadOption
		}{
			{"json", `{"Sides":3}`, `{"Sides":6}`, nil},
			{"named", `{"Sides":3}`, `{"Sides":6}`, nil},
			{"xml", `<shape><Sides>3</Sides></shape>`, `<shape><Sides>6</Sides></shape>`, []PayloadOption{WithCodec(xmlCodec{})}},
		} {
			task, err := NewTask(tc.queue, shape{3}, tc.opts...)
			require.NoError(t, err)
			require.Equal(t, Task{Queue: tc.queue, Payload: []byte(tc.payload)}, task)
			id := produce(t, q, task)[0]
			synctest.Wait()
			require.Empty(t, run.reported())
			done := infoOf(t, q, id)
			require.Equal(t, tc.result, string(done.Result))
			got, err := ResultAs[shape](done, tc.opts...)
			require.NoError(t, err)
			require.Equal(t, shape{6}, got)
		}
	})
}

// TestCodecIsNotAsked: bytes are their own encoding, and no bytes are the zero value.
func TestCodecIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Retention: time.Hour})
		refuse := WithCodec(brokenCodec{errors.New("asked")})
		var m Mux
		var gotBytes []byte
		gotShape := shape{-1}
		Handle(&m, "bytes", func(_ context.Context, j *Job[[]byte]) error {
			gotBytes = j.Args
			return j.SetResultValue([]byte("raw result"))
		}, refuse)
		Handle(&m, "empty", func(_ context.Context, j *Job[shape]) error {
			gotShape = j.Args
			return nil
		}, refuse)
		run := startRun(t, q, &m, RunOptions{})
		task, err := NewTask("bytes", []byte("raw"), refuse)
		require.NoError(t, err)
		ids := produce(t, q, task, Task{Queue: "empty"})
		synctest.Wait()
		require.Empty(t, run.reported())
		require.Equal(t, "raw", string(gotBytes))
		require.Equal(t, shape{}, gotShape)
		result, err := ResultAs[[]byte](infoOf(t, q, ids[0]), refuse)
		require.NoError(t, err)
		require.Equal(t, "raw result", string(result))
		none, err := ResultAs[shape](infoOf(t, q, ids[1]), refuse)
		require.NoError(t, err)
		require.Zero(t, none)
	})
}

// TestCodecErrors: a codec's error reaches the producer, and makes a dead letter
// of a task whose payload or result it refuses.
func TestCodecErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Retention: time.Hour})
		broken := errors.New("broken codec")
		refuse := WithCodec(brokenCodec{broken})
		_, err := NewTask("a", shape{1}, refuse)
		require.ErrorIs(t, err, broken)
		require.EqualError(t, err, "codeq: payload of queue a from codeq.shape: broken codec")

		var m Mux
		Handle(&m, "payload", func(context.Context, *Job[shape]) error { return nil }, refuse)
		Handle(&m, "result", func(_ context.Context, j *Job[[]byte]) error {
			return j.SetResultValue(shape{})
		}, refuse)
		run := startRun(t, q, &m, RunOptions{Concurrency: 1})
		for i, tc := range []struct{ queue, want string }{
			{"payload", "codeq: payload of queue payload into codeq.shape: broken codec"},
			{"result", "codeq: result of queue result from codeq.shape: broken codec"},
		} {
			id := produce(t, q, Task{Queue: tc.queue, Payload: []byte("x")})[0]
			synctest.Wait()
			got := infoOf(t, q, id)
			require.Equal(t, Dead, got.State)
			require.Equal(t, tc.want, got.LastError)
			require.ErrorIs(t, run.reported()[i], broken)
		}

		done := &TaskInfo{Task: Task{Queue: "a"}, State: Done, Result: []byte("{")}
		_, err = ResultAs[shape](done)
		require.ErrorContains(t, err, "codeq: result of queue a into codeq.shape: ")
		for _, opt := range []PayloadOption{nil, WithCodec(nil)} {
			_, err = NewTask("a", shape{}, opt)
			require.ErrorIs(t, err, ErrInvalid)
			_, err = ResultAs[shape](done, opt)
			require.ErrorIs(t, err, ErrInvalid)
		}
		for _, state := range []State{Ready, Scheduled, Leased, Dead} {
			_, err = ResultAs[shape](&TaskInfo{State: state})
			require.ErrorIs(t, err, ErrInvalid, "a %s task has no result yet", state)
		}
	})
}
