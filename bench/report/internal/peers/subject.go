package peers

import (
	"context"
	"errors"
	"regexp"
	"runtime/debug"
	"time"

	"codeq/bench/workload"
)

// subject is a queue with a way to drive it.
type subject struct {
	Name   string // queue/durability/way, for -only
	Queue  string
	Driven string // how, in a phrase
	Keeps  string // losses by a crash of a process, and by a power failure
	Class  class
	Batch  int  // tasks of a call
	Leases bool // the task of a dead worker goes to another one
	// Retains: a completed task is kept for 24 h, and not deleted.
	Retains bool
	// AtHandler: the latency ends with the handler, since the queue does not report when the
	// completion is stored. The completions are counted in the queue.
	AtHandler bool
	Load      workload.Load // the differences to the common load
	open      func(ctx context.Context, dir string, l workload.Load) (*peer, error)
}

// class is the failure that an acknowledged operation survives. A peer has the highest class that
// it fulfils, so one of the class process may lose more than codeq.
type class int

const (
	none    class = iota // nothing
	process              // the end of its process, kill -9 included
	disk                 // a power failure
)

func (c class) String() string { return [...]string{"none", "process", "disk"}[c] }

// peer is an open queue. Its close is called after the load.
type peer struct {
	driver  workload.Driver
	version string
	servers []*server
	closers []func() error
}

// onClose adds a function to close. The last one is called first.
func (p *peer) onClose(f func() error) { p.closers = append(p.closers, f) }

func (p *peer) close() error {
	var errs []error
	for i := len(p.closers) - 1; i >= 0; i-- {
		errs = append(errs, p.closers[i]())
	}
	return errors.Join(errs...)
}

// serve adds the server of startServer to a peer, and stops it at close.
func (p *peer) serve(s *server, err error) error {
	if err == nil {
		p.servers = append(p.servers, s)
		p.onClose(s.stop)
	}
	return err
}

// cpu returns the processor time of the servers.
func (p *peer) cpu() time.Duration {
	var sum time.Duration
	for _, s := range p.servers {
		sum += s.cpu()
	}
	return sum
}

// subjects returns all subjects, in the order of the table.
func subjects() []subject {
	var all []subject
	for _, s := range [][]subject{codeqSubjects(), natsSubjects(), beanstalkdSubjects(), asynqSubjects(), riverSubjects(), riverSQLiteSubjects(), backliteSubjects(), referenceSubjects()} {
		all = append(all, s...)
	}
	return all
}

// matching returns the subjects with matching names.
func matching(all []subject, only *regexp.Regexp) []subject {
	var chosen []subject
	for _, s := range all {
		if only.MatchString(s.Name) {
			chosen = append(chosen, s)
		}
	}
	return chosen
}

// moduleVersion returns the version of a module in this program.
func moduleVersion(path string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range info.Deps {
		if m.Path == path {
			return m.Version
		}
	}
	return "unknown"
}

// closeUnless closes a peer if its opening failed.
func closeUnless(err *error, p *peer) {
	if *err != nil {
		*err = errors.Join(*err, p.close())
	}
}
