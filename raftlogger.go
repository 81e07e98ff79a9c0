package codeq

import (
	"context"
	"log/slog"

	"github.com/hashicorp/go-hclog"
)

// raftLogger passes what Raft warns of to a logger.
func raftLogger(log *slog.Logger) hclog.Logger {
	if !log.Enabled(context.Background(), slog.LevelWarn) {
		return hclog.NewNullLogger()
	}
	std := slog.NewLogLogger(log.Handler(), slog.LevelWarn)
	return hclog.FromStandardLogger(std, &hclog.LoggerOptions{Name: "raft", Level: hclog.Warn, DisableTime: true})
}
