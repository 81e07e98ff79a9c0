package codeq_test

import (
	"fmt"

	"codeq"
)

// Customers of the large plan get three tasks done for each one of the others.
func ExampleSettings_tenantWeights() {
	q, done := open()
	defer done()
	check(q.Configure(ctx, "render", func(s *codeq.Settings) {
		s.TenantWeights = map[string]int{"large": 3}
	}))

	for _, tenant := range []string{"small", "large"} {
		for range 6 {
			_, err := q.Produce(ctx, codeq.Task{Queue: "render", Tenant: tenant})
			check(err)
		}
	}
	leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"render"}, Max: 8})
	check(err)
	for _, lease := range leases {
		fmt.Print(lease.Tenant, " ")
	}
	fmt.Println()
	// Output: small large large large small large large large
}
