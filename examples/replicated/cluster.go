package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

const (
	startLimit    = 30 * time.Second // until the cluster serves
	failoverLimit = 30 * time.Second // until it does again after a kill
	idleLimit     = time.Minute      // until the last task is done
	downTime      = time.Second      // until a killed node is started again
	progress      = 2 * time.Second  // between two lines with the rate
)

// cluster starts and kills the nodes. One goroutine uses it.
type cluster struct {
	config    *config
	out       io.Writer
	started   time.Time
	nodes     [nodes + 1]*process // by number; nil: not running
	events    chan event          // from the processes; the last one of each is its end
	done      int64               // tasks since the last line of progress
	printedAt time.Time           // when that line was printed
}

// process is a running node.
type process struct {
	node   int
	cmd    *exec.Cmd
	orders io.Closer // its standard input; when it ends, the node produces no more tasks
	done   int64     // as in its last report
	idle   bool
	ended  bool
	err    error // of its end
}

// event is a report of a process, or its end.
type event struct {
	of     *process
	report *report // nil: the process has ended
	err    error
}

func newCluster(c *config, out io.Writer) *cluster {
	return &cluster{config: c, out: out, started: time.Now(), printedAt: time.Now(), events: make(chan event)}
}

func (cl *cluster) tell(format string, args ...any) {
	_, _ = fmt.Fprintf(cl.out, "%5.1fs  %s\n", time.Since(cl.started).Seconds(), fmt.Sprintf(format, args...))
}

// run starts the nodes, and kills some of them, until ctx ends or the time is over; then it waits
// until all tasks are done.
func (cl *cluster) run(ctx context.Context) error {
	defer func() {
		for i := range cl.nodes {
			cl.kill(i) // nodes that still run after an error
		}
	}()
	for i := 1; i <= nodes; i++ {
		if err := cl.start(i); err != nil {
			return err
		}
	}
	took, err := cl.served(startLimit)
	if err != nil {
		return err
	}
	cl.tell("all shards are served after %v", took)
	end := time.Now().Add(cl.config.length)
	for ctx.Err() == nil && time.Now().Before(end) {
		work, kill := time.Until(end), false
		if every := cl.config.kill; every > 0 && every < work {
			work, kill = every, true
		}
		if err := cl.work(ctx, work); err != nil {
			return err
		}
		if kill && ctx.Err() == nil {
			if err := cl.killOne(ctx); err != nil {
				return err
			}
		}
	}
	return cl.end()
}

// killOne kills a node, and starts it again on its directory.
func (cl *cluster) killOne(ctx context.Context) error {
	victim := 1 + rand.IntN(nodes)
	cl.kill(victim)
	took, err := cl.served(failoverLimit)
	if err != nil {
		return err
	}
	cl.tell("killed %s; all shards were served again after %v", cl.config.name(victim), took)
	if err := cl.work(ctx, downTime); err != nil {
		return err
	}
	cl.tell("started %s again", cl.config.name(victim))
	return cl.start(victim)
}

// end stops producing, waits until all tasks are done, and ends the nodes.
func (cl *cluster) end() error {
	cl.tell("no more tasks are produced")
	running := cl.nodes[1:]
	for _, p := range running {
		if err := p.orders.Close(); err != nil {
			return err
		}
	}
	err := cl.until(idleLimit, "there is work left", func(*report) bool {
		for _, p := range running {
			if !p.idle {
				return false
			}
		}
		return true
	})
	if err != nil {
		return err
	}
	cl.tell("all tasks are done")
	for _, p := range running {
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
	}
	for _, p := range running {
		if err := cl.wait(p); err != nil {
			return cl.failed(p)
		}
	}
	return nil
}

// start starts a node, as a process of this program.
func (cl *cluster) start(i int) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	c := cl.config
	cmd := exec.Command(exe, "-node", strconv.Itoa(i), "-dir", c.dir, "-port", strconv.Itoa(c.port),
		"-rate", strconv.Itoa(c.rate), "-workers", strconv.Itoa(c.workers))
	log, err := os.OpenFile(c.path(i, ".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o666)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the process has its own file descriptor
	cmd.Stderr = log
	orders, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	reports, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	p := &process{node: i, cmd: cmd, orders: orders}
	cl.nodes[i] = p
	go func() {
		in := json.NewDecoder(reports)
		for {
			r := new(report)
			if in.Decode(r) != nil { // the process has ended
				cl.events <- event{of: p, err: cmd.Wait()}
				return
			}
			cl.events <- event{of: p, report: r}
		}
	}()
	return nil
}

// kill ends a node with SIGKILL, if it runs.
func (cl *cluster) kill(i int) {
	if p := cl.nodes[i]; p != nil && !p.ended {
		_ = p.cmd.Process.Kill() // it may have ended already
		_ = cl.wait(p)           // the error is that it was killed
	}
	cl.nodes[i] = nil
}

// wait waits for the end of a process.
func (cl *cluster) wait(p *process) error {
	for !p.ended {
		cl.take(<-cl.events)
	}
	return p.err
}

// served waits until all shards have answered a new request of a node.
func (cl *cluster) served(limit time.Duration) (took time.Duration, err error) {
	begin := time.Now()
	err = cl.until(limit, "some shard is not served", func(r *report) bool { return r.Asked.After(begin) })
	return time.Since(begin).Round(time.Millisecond), err
}

// work waits while the nodes work, for d or until ctx ends.
func (cl *cluster) work(ctx context.Context, d time.Duration) error {
	end := time.Now().Add(d)
	return cl.until(d+failoverLimit, "no node says anything", func(*report) bool {
		return time.Now().After(end) || ctx.Err() != nil
	})
}

// until waits for a report that satisfies a condition. It fails if a process ends meanwhile.
func (cl *cluster) until(limit time.Duration, late string, holds func(*report) bool) error {
	over := time.NewTimer(limit)
	defer over.Stop()
	for {
		select {
		case e := <-cl.events:
			cl.take(e)
			if e.report == nil {
				return cl.failed(e.of)
			}
			if holds(e.report) {
				return nil
			}
		case <-over.C:
			return fmt.Errorf("%s after %v; see the logs in %s", late, limit, cl.config.dir)
		}
	}
}

// take processes a report of a process.
func (cl *cluster) take(e event) {
	p, r := e.of, e.report
	if r == nil {
		p.ended, p.err = true, e.err
		return
	}
	cl.done += r.Done - p.done
	p.done, p.idle = r.Done, r.Idle
	if since := time.Since(cl.printedAt); since > progress {
		cl.tell("%.0f tasks done a second", float64(cl.done)/since.Seconds())
		cl.done, cl.printedAt = 0, time.Now()
	}
}

// failed returns the error for a process that has ended unexpectedly.
func (cl *cluster) failed(p *process) error {
	return fmt.Errorf("%s has ended: %v; see %s", cl.config.name(p.node), p.err, cl.config.path(p.node, ".log")) //nolint:errorlint // nil after exit code 0
}
