package codeq

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// produceFor produces tasks of a queue for tenants, so many for each, in batches.
func produceFor(t *testing.T, q *Queue, like Task, each int, tenants ...string) {
	t.Helper()
	var batch []Task
	flush := func() {
		_, err := q.ProduceBatch(context.Background(), batch)
		require.NoError(t, err)
		batch = batch[:0]
	}
	for _, tenant := range tenants {
		like.Tenant = tenant
		for range each {
			if batch = append(batch, like); len(batch) == 10_000 {
				flush()
			}
		}
	}
	flush()
}

// tenantsOf are the tenants of the next claims, in their order.
func tenantsOf(t *testing.T, q *Queue, queue string, claims int) string {
	t.Helper()
	var b strings.Builder
	for range claims {
		l := claimNow(t, q, queue)
		require.NotNil(t, l)
		b.WriteString(l.Tenant)
	}
	return b.String()
}
