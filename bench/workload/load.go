package workload

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Driver is a queue under load. Its methods are safe for concurrent use.
type Driver interface {
	// Produce stores one task for each payload, the n-th and following ones of
	// a producer, and returns when they are acknowledged. It does not keep the
	// payloads.
	Produce(ctx context.Context, producer, n int, payloads [][]byte) error
	// Work claims and completes tasks by a number of workers until ctx ends, and then returns nil.
	// It calls done with the payload of each completed task.
	Work(ctx context.Context, workers int, done func(payload []byte)) error
}

// Pending is implemented by a Driver that calls done before the acknowledgement: it returns the
// number of tasks in the queue that are not completed. Completions are then counted by it.
type Pending interface {
	Pending(ctx context.Context) (int64, error)
}

// Load has the parameters of a load. Its zero fields are the defaults.
type Load struct {
	Producers int // default 32
	Workers   int // default 128
	Batch     int // tasks that a producer stores with one call; default 1
	Payload   int // bytes of a task; default 14; at least 10
	// Backlog bounds the tasks that are produced and not done, rounded down to batches, and at
	// least one batch: producers wait. 0: no bound.
	Backlog int
	// SampleEvery: the latency of one task in so many of a producer, rounded to batches, is
	// measured; default 128.
	SampleEvery int
}

// WithDefaults returns l with its defaults.
func (l Load) WithDefaults() Load {
	for _, f := range []struct {
		value *int
		def   int
	}{{&l.Producers, 32}, {&l.Workers, 128}, {&l.Batch, 1}, {&l.Payload, len(plain)}, {&l.SampleEvery, 128}} {
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	return l
}

// plain is the payload of tasks of the default size.
var plain = []byte(`{"bench":true}`)

// Run is a running load.
type Run struct {
	load   Load
	driver Driver
	ctx    context.Context
	cancel context.CancelCauseFunc
	start  int64 // in nanoseconds since 1970
	wg     sync.WaitGroup

	created atomic.Int64
	done    atomic.Int64
	room    chan struct{} // one element for each batch that may be produced; nil: unlimited

	mu      sync.Mutex
	samples []time.Duration // produce to done, of the sampled tasks
}

// Start begins a load. It runs until Stop, the end of ctx, or an error.
func Start(ctx context.Context, l Load, d Driver) *Run {
	r := &Run{load: l.WithDefaults(), driver: d, start: time.Now().UnixNano()}
	r.ctx, r.cancel = context.WithCancelCause(ctx)
	if r.load.Backlog > 0 {
		n := max(r.load.Backlog/r.load.Batch, 1)
		r.room = make(chan struct{}, n)
		for range n {
			r.room <- struct{}{}
		}
	}
	for i := range r.load.Producers {
		r.wg.Go(func() { r.end(r.produce(i)) })
	}
	r.wg.Go(func() { r.end(d.Work(r.ctx, r.load.Workers, r.complete)) })
	return r
}

// errStopped is the cause of an end by Stop.
var errStopped = errors.New("the load was stopped")

// end ends the load with the first error.
func (r *Run) end(err error) {
	if err == nil && r.ctx.Err() == nil {
		err = errors.New("the driver ended early")
	}
	if err != nil {
		r.cancel(err)
	}
}

// Stop ends the load, waits for it, and returns the error that ended it before.
func (r *Run) Stop() error {
	r.cancel(errStopped)
	r.wg.Wait()
	if err := context.Cause(r.ctx); !errors.Is(err, errStopped) {
		return err
	}
	return nil
}

// Ended is closed when the load has ended, by an error or by its context.
func (r *Run) Ended() <-chan struct{} { return r.ctx.Done() }

func (r *Run) produce(producer int) error {
	size := r.load.Payload
	first := bytes.Repeat([]byte{'x'}, size)
	if size == len(plain) {
		first = plain
	}
	// The payload of a sampled task has the same length, and contains the time.
	stamped := slices.Clone(first)
	stamped[0] = 0
	payloads := slices.Repeat([][]byte{first}, r.load.Batch)
	for n := 0; r.ctx.Err() == nil; n += r.load.Batch {
		if r.room != nil {
			select {
			case <-r.room:
			case <-r.ctx.Done():
				return nil
			}
		}
		payloads[0] = first
		if n/r.load.Batch%max(r.load.SampleEvery/r.load.Batch, 1) == 0 {
			binary.LittleEndian.PutUint64(stamped[1:], uint64(time.Now().UnixNano()))
			payloads[0] = stamped
		}
		if err := r.driver.Produce(r.ctx, producer, n, payloads); err != nil {
			if r.ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("produce: %w", err)
		}
		r.created.Add(int64(r.load.Batch))
	}
	return nil
}

// complete counts a done task; the driver calls it.
func (r *Run) complete(payload []byte) {
	if n := r.done.Add(1); r.room != nil && n%int64(r.load.Batch) == 0 {
		// There is room again for each batch taken out. Only a task that is delivered twice finds
		// none.
		select {
		case r.room <- struct{}{}:
		default:
		}
	}
	if len(payload) < 9 || payload[0] != 0 {
		return
	}
	produced := int64(binary.LittleEndian.Uint64(payload[1:]))
	if produced < r.start { // by an earlier load
		return
	}
	took := time.Duration(time.Now().UnixNano() - produced)
	r.mu.Lock()
	r.samples = append(r.samples, took)
	r.mu.Unlock()
}

// Counts returns the numbers of created and completed tasks since the start.
func (r *Run) Counts() (created, completed int64, err error) {
	p, ok := r.driver.(Pending)
	if !ok {
		return r.created.Load(), r.done.Load(), nil
	}
	created = r.created.Load()
	pending, err := p.Pending(r.ctx)
	return created, created - pending, err
}

// Latencies returns the times from the call of Produce to the completion of the tasks sampled since
// the last call, in ascending order.
func (r *Run) Latencies() Latencies {
	r.mu.Lock()
	samples := r.samples
	r.samples = make([]time.Duration, 0, len(samples))
	r.mu.Unlock()
	slices.Sort(samples)
	return samples
}

// Latencies are in ascending order.
type Latencies []time.Duration

// Quantile returns the smallest latency that is at least as large as the share p of all; 0 if there
// are none.
func (l Latencies) Quantile(p float64) time.Duration {
	if len(l) == 0 {
		return 0
	}
	return l[min(int(p*float64(len(l))), len(l)-1)]
}

// Result of a window.
type Result struct {
	Created, Completed int64
	Elapsed            time.Duration
	Latencies          Latencies
	Usage              Usage // of this process, in the window
}

// Cycles returns the number of cycles in the window.
func (r Result) Cycles() int64 { return min(r.Created, r.Completed) }

// Rate returns cycles a second.
func (r Result) Rate() float64 { return float64(r.Cycles()) / r.Elapsed.Seconds() }

// FellBehind reports whether completions fell behind creations by more than a tenth.
func (r Result) FellBehind() bool { return r.Completed < r.Created*9/10 }

// Measure measures the load for a window. It returns early, with the error, if the load ends.
func (r *Run) Measure(window time.Duration) (Result, error) {
	r.Latencies()
	before := ReadUsage()
	created, completed, err := r.Counts()
	start := time.Now()
	if err != nil {
		return Result{}, err
	}
	select {
	case <-time.After(window):
	case <-r.ctx.Done():
		return Result{}, context.Cause(r.ctx)
	}
	var res Result
	if res.Created, res.Completed, err = r.Counts(); err != nil {
		return Result{}, err
	}
	res.Created, res.Completed, res.Elapsed = res.Created-created, res.Completed-completed, time.Since(start)
	res.Usage = ReadUsage().Since(before)
	res.Latencies = r.Latencies()
	return res, nil
}
