package peers

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"

	"codeq/bench/workload"
)

// asynqServers is the number of servers that share the workers: each takes one task after the other
// from Redis, so the round trip bounds a single server.
const asynqServers = 4

// asynqSubjects returns asynq on Redis over TCP: one client, four servers with a quarter of the
// workers each, connections for all of them, and, without tasks, a poll every 5 ms. It has no call
// for several tasks.
func asynqSubjects() []subject {
	var all []subject
	for _, s := range []struct {
		name, keeps string
		class       class
		redis       []string
	}{
		{"noaof", "crash of Redis: all; power: all", none, []string{"--appendonly", "no"}},
		{"everysec", "crash: nothing; power: the last second", process, []string{"--appendonly", "yes", "--appendfsync", "everysec"}},
		{"always", "nothing", disk, []string{"--appendonly", "yes", "--appendfsync", "always"}},
	} {
		all = append(all, subject{
			Name: "asynq/" + s.name + "/single", Queue: "asynq", Driven: "Enqueue; 4 servers of 32 handlers",
			Keeps: s.keeps, Class: s.class, Batch: 1, Leases: true, AtHandler: true,
			open: func(ctx context.Context, dir string, l workload.Load) (*peer, error) {
				return openAsynq(ctx, dir, l, s.redis)
			},
		})
	}
	return all
}

func openAsynq(ctx context.Context, dir string, l workload.Load, redisArgs []string) (_ *peer, err error) {
	p := &peer{}
	defer closeUnless(&err, p)
	path, addr, port, err := place("redis-server", "/usr/bin/redis-server")
	if err != nil {
		return nil, err
	}
	// More connections would never be used at the same time.
	rdb := redis.NewClient(&redis.Options{Addr: addr, PoolSize: l.Producers + l.Workers + asynqServers})
	p.onClose(rdb.Close)
	args := append([]string{"--bind", "127.0.0.1", "--port", port, "--dir", dir, "--save", ""}, redisArgs...)
	err = p.serve(startServer(ctx, dir, nil, syscall.SIGKILL, func(ctx context.Context) error {
		return rdb.Ping(ctx).Err()
	}, path, args...))
	if err != nil {
		return nil, err
	}
	info, err := rdb.InfoMap(ctx, "server").Result()
	if err != nil {
		return nil, err
	}
	p.version = moduleVersion("github.com/hibiken/asynq") + ", Redis " + info["Server"]["redis_version"]
	p.driver = &asynqDriver{
		rdb: rdb, client: asynq.NewClientFromRedisClient(rdb), inspector: asynq.NewInspectorFromRedisClient(rdb),
	}
	return p, nil
}

type asynqDriver struct {
	rdb       *redis.Client
	client    *asynq.Client
	inspector *asynq.Inspector
}

const asynqKind = "bench"

func (d *asynqDriver) Produce(ctx context.Context, _, _ int, payloads [][]byte) error {
	_, err := d.client.EnqueueContext(ctx, asynq.NewTask(asynqKind, payloads[0]))
	return err
}

func (d *asynqDriver) Work(ctx context.Context, workers int, done func(payload []byte)) (err error) {
	handler := asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		done(t.Payload())
		return nil
	})
	for range asynqServers {
		s := asynq.NewServerFromRedisClient(d.rdb, asynq.Config{
			Concurrency:       workers / asynqServers,
			TaskCheckInterval: 5 * time.Millisecond,
			Logger:            silence{},
			LogLevel:          asynq.FatalLevel,
		})
		if err := s.Start(handler); err != nil {
			return err
		}
		defer s.Shutdown()
	}
	<-ctx.Done()
	return nil
}

// Pending counts, since a handler does not learn when its completion is stored.
func (d *asynqDriver) Pending(context.Context) (int64, error) {
	info, err := d.inspector.GetQueueInfo("default")
	if errors.Is(err, asynq.ErrQueueNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return int64(info.Size), nil
}

type silence struct{}

func (silence) Debug(...any) {}
func (silence) Info(...any)  {}
func (silence) Warn(...any)  {}
func (silence) Error(...any) {}
func (silence) Fatal(...any) {}
