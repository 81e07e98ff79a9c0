package codeq_test

import (
	"context"
	"encoding/xml"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
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
		q := openForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		double := func(_ context.Context, j *codeq.Job[shape]) error {
			return j.SetResultValue(shape{2 * j.Args.Sides})
		}
		codeq.Handle(&m, "json", double)
		codeq.Handle(&m, "named", double, codeq.WithCodec(codeq.JSON{}))
		codeq.Handle(&m, "xml", double, codeq.WithCodec(xmlCodec{}))
		run := startRun(t, q, &m, codeq.RunOptions{})
		for _, tc := range []struct {
			queue, payload, result string
			opts                   []codeq.PayloadOption
		}{
			{"json", `{"Sides":3}`, `{"Sides":6}`, nil},
			{"named", `{"Sides":3}`, `{"Sides":6}`, nil},
			{"xml", `<shape><Sides>3</Sides></shape>`, `<shape><Sides>6</Sides></shape>`, []codeq.PayloadOption{codeq.WithCodec(xmlCodec{})}},
		} {
			task, err := codeq.NewTask(tc.queue, shape{3}, tc.opts...)
			require.NoError(t, err)
			require.Equal(t, codeq.Task{Queue: tc.queue, Payload: []byte(tc.payload)}, task)
			id := produce(t, q, task)[0]
			synctest.Wait()
			require.Empty(t, run.Reported())
			done := infoOf(t, q, id)
			require.Equal(t, tc.result, string(done.Result))
			got, err := codeq.ResultAs[shape](done, tc.opts...)
			require.NoError(t, err)
			require.Equal(t, shape{6}, got)
		}
	})
}

// TestCodecIsNotAsked: bytes are their own encoding, and no bytes are the zero value.
func TestCodecIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Retention: time.Hour})
		refuse := codeq.WithCodec(brokenCodec{errors.New("asked")})
		var m codeq.Mux
		var gotBytes []byte
		gotShape := shape{-1}
		codeq.Handle(&m, "bytes", func(_ context.Context, j *codeq.Job[[]byte]) error {
			gotBytes = j.Args
			return j.SetResultValue([]byte("raw result"))
		}, refuse)
		codeq.Handle(&m, "empty", func(_ context.Context, j *codeq.Job[shape]) error {
			gotShape = j.Args
			return nil
		}, refuse)
		run := startRun(t, q, &m, codeq.RunOptions{})
		task, err := codeq.NewTask("bytes", []byte("raw"), refuse)
		require.NoError(t, err)
		ids := produce(t, q, task, codeq.Task{Queue: "empty"})
		synctest.Wait()
		require.Empty(t, run.Reported())
		require.Equal(t, "raw", string(gotBytes))
		require.Equal(t, shape{}, gotShape)
		result, err := codeq.ResultAs[[]byte](infoOf(t, q, ids[0]), refuse)
		require.NoError(t, err)
		require.Equal(t, "raw result", string(result))
		none, err := codeq.ResultAs[shape](infoOf(t, q, ids[1]), refuse)
		require.NoError(t, err)
		require.Zero(t, none)
	})
}

// TestCodecErrors: a codec's error reaches the producer, and makes a dead letter
// of a task whose payload or result it refuses.
func TestCodecErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Retention: time.Hour})
		broken := errors.New("broken codec")
		refuse := codeq.WithCodec(brokenCodec{broken})
		_, err := codeq.NewTask("a", shape{1}, refuse)
		require.ErrorIs(t, err, broken)
		require.EqualError(t, err, "codeq: payload of queue a from codeq_test.shape: broken codec")

		var m codeq.Mux
		codeq.Handle(&m, "payload", func(context.Context, *codeq.Job[shape]) error { return nil }, refuse)
		codeq.Handle(&m, "result", func(_ context.Context, j *codeq.Job[[]byte]) error {
			return j.SetResultValue(shape{})
		}, refuse)
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		for i, tc := range []struct{ queue, want string }{
			{"payload", "codeq: payload of queue payload into codeq_test.shape: broken codec"},
			{"result", "codeq: result of queue result from codeq_test.shape: broken codec"},
		} {
			id := produce(t, q, codeq.Task{Queue: tc.queue, Payload: []byte("x")})[0]
			synctest.Wait()
			got := infoOf(t, q, id)
			require.Equal(t, codeq.Dead, got.State)
			require.Equal(t, tc.want, got.LastError)
			require.ErrorIs(t, run.Reported()[i], broken)
		}

		done := &codeq.TaskInfo{Task: codeq.Task{Queue: "a"}, State: codeq.Done, Result: []byte("{")}
		_, err = codeq.ResultAs[shape](done)
		require.ErrorContains(t, err, "codeq: result of queue a into codeq_test.shape: ")
		for _, opt := range []codeq.PayloadOption{nil, codeq.WithCodec(nil)} {
			_, err = codeq.NewTask("a", shape{}, opt)
			require.ErrorIs(t, err, codeq.ErrInvalid)
			_, err = codeq.ResultAs[shape](done, opt)
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
		for _, state := range []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Leased, codeq.Dead} {
			_, err = codeq.ResultAs[shape](&codeq.TaskInfo{State: state})
			require.ErrorIs(t, err, codeq.ErrInvalid, "a %s task has no result yet", state)
		}
	})
}
