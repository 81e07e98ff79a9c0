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

// Driver is a queue under load. Its methods are called by many goroutines.
type Driver interface {
	// Produce stores one task for each payload, the n-th and following ones of
	// a producer, and returns when they are acknowledged. It does not keep the
	// payloads.
	Produce(ctx context.Context, producer, n int, payloads [][]byte) error
	// Work lets workers claim tasks and complete them until ctx ends, and then
	// returns nil. It calls done with the payload of each task that it has
	// completed.
	Work(ctx context.Context, workers int, done func(payload []byte)) error
}

// Pending is what a Driver has, too, that calls done before the completion is
// acknowledged: the tasks that the queue has and that are not completed.
// Completions are then counted by it.
type Pending interface {
	Pending(ctx context.Context) (int64, error)
}

// Load says what is run. Its zero fields are the defaults.
type Load struct {
	Producers int // default 32
	Workers   int // default 128
	Batch     int // tasks that a producer stores with one call; default 1
	Payload   int // bytes of a task; default 14; at least 10
	// Backlog is how many tasks are produced and not done with at the most,
	// rounded down to batches, and at least one batch: producers wait. 0: any number.
	Backlog int
	// SampleEvery is how many tasks of a producer there are, rounded to batches,
	// for one whose latency is measured; default 128.
	SampleEvery int
}

// WithDefaults returns what l stands for.
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

// Run is a load that is running.
type Run struct {
	load   Load
	driver Driver
	ctx    context.Context
	cancel context.CancelCauseFunc
	start  int64 // in nanoseconds since 1970
	wg     sync.WaitGroup

	created atomic.Int64
	done    atomic.Int64
	room    chan struct{} // nil: unlimited; one for each batch that may be produced

	mu      sync.Mutex
	samples []time.Duration // produce to done, of the sampled tasks
}

// Start begins a load, which runs until Stop, the end of ctx, or an error.
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

// errStopped is the cause of the end of a load that Stop has ended.
var errStopped = errors.New("the load was stopped")

// end makes the first error the end of the load.
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
	// A sampled task has a payload of the same length that holds the time.
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

// complete is what the driver calls for a task that is done.
func (r *Run) complete(payload []byte) {
	if n := r.done.Add(1); r.room != nil && n%int64(r.load.Batch) == 0 {
		// There is room for as many as were taken out; only a task that is
		// delivered twice finds none.
		select {
		case r.room <- struct{}{}:
		default:
		}
	}
	if len(payload) < 9 || payload[0] != 0 {
		return
	}
	produced := int64(binary.LittleEndian.Uint64(payload[1:]))
	if produced < r.start { // by a load before this one
		return
	}
	took := time.Duration(time.Now().UnixNano() - produced)
	r.mu.Lock()
	r.samples = append(r.samples, took)
	r.mu.Unlock()
}

// Counts are the tasks that were created and completed since the start.
func (r *Run) Counts() (created, completed int64, err error) {
	p, ok := r.driver.(Pending)
	if !ok {
		return r.created.Load(), r.done.Load(), nil
	}
	created = r.created.Load()
	pending, err := p.Pending(r.ctx)
	return created, created - pending, err
}

// Latencies are the times from the call of Produce to the completion of the
// tasks that were sampled since the last call, in ascending order.
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

// Quantile returns the smallest that at least the share p of them do not
// exceed; 0 if there are none.
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

// Cycles is how many there were in the window.
func (r Result) Cycles() int64 { return min(r.Created, r.Completed) }

// Rate is cycles a second.
func (r Result) Rate() float64 { return float64(r.Cycles()) / r.Elapsed.Seconds() }

// FellBehind reports that completions did not keep up with what was created.
func (r Result) FellBehind() bool { return r.Completed < r.Created*9/10 }

// Measure lets the load run for a window. It returns early, with the error, if the load ends.
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
