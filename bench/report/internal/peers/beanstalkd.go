package peers

import (
	"context"
	"errors"
	"math"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/beanstalkd/go-beanstalk"
	"golang.org/x/sync/errgroup"

	"codeq/bench/workload"
)

// beanstalkdSubjects returns beanstalkd with its binary log, over TCP, with its authors' client and
// a connection for each producer and worker: put; reserve, delete. It has no call for several jobs.
func beanstalkdSubjects() []subject {
	s := subject{
		Queue: "beanstalkd", Driven: "put, reserve, delete; a connection each",
		Class: process, Batch: 1, Leases: true,
	}
	every50, each := s, s
	every50.Name, every50.Keeps = "beanstalkd/50ms/single", "crash: nothing; power: the last 50 ms"
	every50.open = openBeanstalkd("50")
	each.Name, each.Keeps, each.Class = "beanstalkd/fsync/single", "nothing", disk
	each.open = openBeanstalkd("0")
	return []subject{every50, each}
}

func openBeanstalkd(fsyncMillis string) func(context.Context, string, workload.Load) (*peer, error) {
	return func(ctx context.Context, dir string, l workload.Load) (_ *peer, err error) {
		p := &peer{}
		defer closeUnless(&err, p)
		path, addr, port, err := place("beanstalkd", "/usr/sbin/beanstalkd")
		if err != nil {
			return nil, err
		}
		err = p.serve(startServer(ctx, dir, nil, syscall.SIGTERM, func(context.Context) error {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return err
			}
			return c.Close()
		}, path, "-l", "127.0.0.1", "-p", port, "-b", dir, "-f", fsyncMillis))
		if err != nil {
			return nil, err
		}
		d := &beanstalkd{addr: addr}
		p.driver = d
		p.onClose(d.close)
		for range l.Producers {
			c, err := beanstalk.Dial("tcp", addr)
			if err != nil {
				return nil, err
			}
			d.producers = append(d.producers, c)
		}
		v, err := exec.CommandContext(ctx, path, "-v").Output()
		p.version = strings.TrimPrefix(lastLine(v), filepath.Base(path)+" ")
		return p, err
	}
}

type beanstalkd struct {
	addr      string
	producers []*beanstalk.Conn // each is used by its producer only
}

func (d *beanstalkd) close() error {
	var errs []error
	for _, c := range d.producers {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

func (d *beanstalkd) Produce(_ context.Context, producer, _ int, payloads [][]byte) error {
	_, err := d.producers[producer].Put(payloads[0], math.MaxUint32/2, 0, time.Minute)
	return err
}

func (d *beanstalkd) Work(ctx context.Context, workers int, done func(payload []byte)) error {
	g, ctx := errgroup.WithContext(ctx)
	for range workers {
		g.Go(func() error { return d.work(ctx, done) })
	}
	return g.Wait()
}

func (d *beanstalkd) work(ctx context.Context, done func(payload []byte)) (err error) {
	c, err := beanstalk.Dial("tcp", d.addr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	for ctx.Err() == nil {
		id, body, err := c.Reserve(time.Second)
		if errors.Is(err, beanstalk.ErrTimeout) {
			continue
		}
		if err == nil {
			err = c.Delete(id)
		}
		if err != nil {
			return err
		}
		done(body)
	}
	return nil
}
