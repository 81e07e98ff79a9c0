package peers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"codeq/bench/workload"
)

// natsWay is a way to publish messages.
type natsWay int

const (
	natsSync  natsWay = iota // Publish, a message at a time
	natsAsync                // PublishAsync of 64, and waits for all
	natsFast                 // one batch of JetStream's fast ingest
)

// natsSubjects returns a work queue of NATS JetStream in this process, in a file store, without a
// socket. Completions are confirmed: single calls by DoubleAck; otherwise a worker sends acks with
// replies for all messages at hand, and then waits for the replies.
func natsSubjects() []subject {
	var all []subject
	for _, s := range []struct {
		name, keeps string
		class       class
		syncAlways  bool
	}{
		{"2min", "crash: no message, perhaps the last acks; power: the last 2 minutes", process, false},
		{"always", "nothing", disk, true},
	} {
		for _, w := range []struct {
			name, driven string
			way          natsWay
			batch        int
		}{
			{"sync", "Publish, DoubleAck", natsSync, 1},
			{"async", "PublishAsync of 64, confirmed acks", natsAsync, batchSize},
			{"batch", "fast batches of 64, confirmed acks", natsFast, batchSize},
		} {
			all = append(all, subject{
				Name: "nats/" + s.name + "/" + w.name, Queue: "NATS JetStream", Driven: w.driven + ", in process",
				Keeps: s.keeps, Class: s.class, Batch: w.batch, Leases: true,
				open: func(ctx context.Context, dir string, l workload.Load) (*peer, error) {
					return openNATS(ctx, dir, s.syncAlways, w.way)
				},
			})
		}
	}
	return all
}

const (
	natsStream     = "BENCH"
	natsSubject    = "bench"
	natsConns      = 2 // for producers, and as many for workers
	natsMaxPending = 2 * backlog
	natsConsumer   = "workers"
	natsFetch      = 512 // messages that a connection fetches in advance, and acknowledges together
	natsAckers     = 2   // for each connection
)

func openNATS(ctx context.Context, dir string, syncAlways bool, way natsWay) (_ *peer, err error) {
	p := &peer{version: natsserver.VERSION}
	defer closeUnless(&err, p)
	s, err := natsserver.NewServer(&natsserver.Options{
		DontListen: true, JetStream: true, StoreDir: dir, SyncAlways: syncAlways, NoSigs: true, NoLog: true,
	})
	if err != nil {
		return nil, err
	}
	s.Start()
	p.onClose(func() error {
		s.Shutdown()
		s.WaitForShutdown()
		return nil
	})
	if !s.ReadyForConnections(10 * time.Second) {
		return nil, errors.New("the server did not become ready")
	}
	d := &natsDriver{way: way}
	for range 2 * natsConns {
		c, err := nats.Connect("", nats.InProcessServer(s))
		if err != nil {
			return nil, err
		}
		p.onClose(func() error { c.Close(); return nil })
		js, err := jetstream.New(c, jetstream.WithPublishAsyncMaxPending(natsMaxPending))
		if err != nil {
			return nil, err
		}
		d.conns = append(d.conns, natsConn{c, js})
	}
	stream, err := d.conns[0].js.CreateStream(ctx, jetstream.StreamConfig{
		Name: natsStream, Subjects: []string{natsSubject}, Storage: jetstream.FileStorage, Retention: jetstream.WorkQueuePolicy,
		AllowBatchPublish: way == natsFast,
	})
	if err != nil {
		return nil, err
	}
	_, err = stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		Durable: natsConsumer, AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Minute, MaxAckPending: natsMaxPending,
	})
	p.driver = d
	return p, err
}

type natsConn struct {
	*nats.Conn
	js jetstream.JetStream
}

type natsDriver struct {
	way     natsWay
	conns   []natsConn // the first half for producers
	batches sync.Pool  // of *natsBatch
}

func (d *natsDriver) Produce(ctx context.Context, producer, _ int, payloads [][]byte) error {
	c := d.conns[producer%natsConns]
	switch d.way {
	case natsAsync:
		futures := make([]jetstream.PubAckFuture, len(payloads))
		for i, p := range payloads {
			var err error
			if futures[i], err = c.js.PublishAsync(natsSubject, p); err != nil {
				return err
			}
		}
		for _, f := range futures {
			select {
			case <-f.Ok():
			case err := <-f.Err():
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	case natsFast:
		return d.fastBatch(ctx, c, payloads)
	default:
		_, err := c.js.Publish(ctx, natsSubject, payloads[0])
		return err
	}
}

// natsBatch is an inbox for the replies to fast batches, one after the other.
type natsBatch struct {
	inbox string
	sub   *nats.Subscription
	n     int
}

// fastBatch publishes by the protocol of ADR-50: the reply subject of a message has its batch and
// its position, and that of the last message gets the acknowledgement of all.
func (d *natsDriver) fastBatch(ctx context.Context, c natsConn, payloads [][]byte) error {
	b, _ := d.batches.Get().(*natsBatch)
	if b == nil {
		b = &natsBatch{inbox: c.NewRespInbox()}
		var err error
		if b.sub, err = c.SubscribeSync(b.inbox + ".>"); err != nil {
			return err
		}
	}
	b.n++
	id := fmt.Sprint(b.inbox[strings.LastIndexByte(b.inbox, '.')+1:], b.n)
	for i, p := range payloads {
		op := "1" // append
		switch i {
		case 0:
			op = "0" // start
		case len(payloads) - 1:
			op = "2" // commit
		}
		reply := b.inbox + "." + id + ".64.fail." + strconv.Itoa(i+1) + "." + op + ".$FI"
		if err := c.PublishRequest(natsSubject, reply, p); err != nil {
			return err
		}
	}
	for {
		m, err := b.sub.NextMsgWithContext(ctx)
		if err != nil {
			return err
		}
		var ack struct {
			Error *natsserver.ApiError
			Batch string
			Count int
		}
		if err := json.Unmarshal(m.Data, &ack); err != nil {
			return fmt.Errorf("reply to a batch: %w: %s", err, m.Data)
		}
		switch {
		case ack.Error != nil:
			return ack.Error
		case ack.Batch == id && ack.Count == len(payloads):
			d.batches.Put(b)
			return nil
		}
	}
}

func (d *natsDriver) Work(ctx context.Context, workers int, done func(payload []byte)) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, c := range d.conns[natsConns:] {
		consumer, err := c.js.Consumer(ctx, natsStream, natsConsumer)
		if err != nil {
			return err
		}
		messages := make(chan jetstream.Msg, natsFetch)
		consuming, err := consumer.Consume(func(m jetstream.Msg) {
			select {
			case messages <- m:
			case <-ctx.Done():
			}
		}, jetstream.PullMaxMessages(natsFetch))
		if err != nil {
			return err
		}
		defer consuming.Stop()
		if d.way != natsSync {
			for range natsAckers {
				g.Go(func() error { return ackAll(ctx, c.Conn, messages, done) })
			}
			continue
		}
		for range workers / natsConns {
			g.Go(func() error { return ackEach(ctx, messages, done) })
		}
	}
	if err := g.Wait(); context.Cause(ctx) == nil || !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func ackEach(ctx context.Context, messages <-chan jetstream.Msg, done func(payload []byte)) error {
	for {
		select {
		case m := <-messages:
			if err := m.DoubleAck(ctx); err != nil {
				return err
			}
			done(m.Data())
		case <-ctx.Done():
			return nil
		}
	}
}

// ackAll acknowledges the messages at hand, and waits for the replies.
func ackAll(ctx context.Context, c *nats.Conn, messages <-chan jetstream.Msg, done func(payload []byte)) error {
	inbox := c.NewRespInbox()
	replies := make(chan *nats.Msg, natsFetch)
	sub, err := c.ChanSubscribe(inbox, replies)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails if the connection is closed
	group := make([]jetstream.Msg, 0, natsFetch)
	for {
		group = group[:0]
		select {
		case m := <-messages:
			group = append(group, m)
		case <-ctx.Done():
			return nil
		}
		for more := true; more && len(group) < cap(group); {
			select {
			case m := <-messages:
				group = append(group, m)
			default:
				more = false
			}
		}
		for _, m := range group {
			if err := c.PublishRequest(m.Reply(), inbox, natsAck); err != nil {
				return err
			}
		}
		for range group {
			select {
			case <-replies:
			case <-ctx.Done():
				return nil
			}
		}
		for _, m := range group {
			done(m.Data())
		}
	}
}

var natsAck = []byte("+ACK")
